"""`finetune export`: from a checkpoint of any layout to a folder that `from_pretrained` opens, one shard at a time."""
