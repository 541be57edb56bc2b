"""Start and end of a recipe's process, without importing torch: --help, checks of the flags against this machine's
files, and the exit status."""
