"""The command line. torch is imported only by the commands that need it, so that `surogate --help` is instant."""
