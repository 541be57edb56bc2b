"""`finetune report`: runs and benchmarks as one page or as Markdown, written by `finetune.report.write`."""
