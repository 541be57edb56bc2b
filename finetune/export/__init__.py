"""`finetune export`: converts a checkpoint of any layout to a folder that `from_pretrained` opens, shard by shard."""
