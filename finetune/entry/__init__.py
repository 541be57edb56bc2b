"""How a recipe begins and ends as a process, before torch is imported: --help, its flags held against the files of this
machine, and its exit status."""
