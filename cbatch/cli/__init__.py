"""The command line: front ends over `cbatch.engine`."""
