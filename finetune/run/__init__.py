"""One run, said once: what a recipe is, which flags it has, and what a command line, a YAML and a launcher make of
them. `start`, `check`, `plan`, `bench` and the trials read it. Imports neither torch nor transformers."""
