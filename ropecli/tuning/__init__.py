"""Finds by measurement what suits a model: a method's constants, its heads' gains and phases, factors for its pairs."""
