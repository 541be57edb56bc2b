"""The flags of recipes, as dataclasses in groups, with the checks that need nothing but flags and the launch."""
