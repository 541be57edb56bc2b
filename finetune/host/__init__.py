"""What the host at hand has: processors, networks, and how a look at it is told. Never imports torch."""
