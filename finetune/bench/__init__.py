"""`finetune bench`: models over layouts; each cell of the grid is a measured launch of recipes/benchmark.py."""
