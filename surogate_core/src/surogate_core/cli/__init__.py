"""The command line. Nothing here imports torch before a verb needs it: `surogate --help` is instant."""
