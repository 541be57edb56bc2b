"""`finetune report`: what runs and benches did, as one page or as Markdown. `finetune.report.write` does it."""
