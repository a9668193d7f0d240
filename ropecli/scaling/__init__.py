"""Frequency methods: pure functions of a RopeGeometry and a factor, one file each, found by `registry`."""
