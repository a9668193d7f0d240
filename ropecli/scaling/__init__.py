"""Frequency methods: pure functions of a RopeGeometry and a factor, one file per method."""
