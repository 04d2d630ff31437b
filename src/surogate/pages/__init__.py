"""Reports that people look at: a page of a run, of a plan or of data, in one file that needs no server."""
