"""A run's single description: what a recipe is, which flags it has, and how a command line, a YAML and a launcher set
them. `start`, `check`, `plan`, `bench` and the trials use it. Imports neither torch nor transformers."""
