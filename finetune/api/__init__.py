"""`from finetune import train, plan, check, load_run`: what the command line does, from Python and notebooks. It takes
the same flags as keyword arguments, checks the same things and writes the same run folder."""
