"""This host's hardware, control groups and network, and the form in which checks report. Never imports torch."""
