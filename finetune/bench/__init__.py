"""`finetune bench`: models over layouts, each cell of the grid a real launch of recipes/benchmark.py, measured."""
