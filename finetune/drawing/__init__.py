"""What reports are made of: pictures, tables, HTML that loads nothing, Markdown. It knows of no report."""
