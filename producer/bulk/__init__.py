"""From a file of rows to a file of results: read, tokenize, submit, collect, write, resume."""
