"""A plan for people: on a terminal (`show`), and as an HTML page or a PNG (`page`), in the same words and figures."""
