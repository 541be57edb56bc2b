"""`finetune doctor`: tests what this machine can do."""
