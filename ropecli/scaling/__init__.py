"""Frequency methods: pure functions of a RopeGeometry and a factor, similar ones in one file."""
