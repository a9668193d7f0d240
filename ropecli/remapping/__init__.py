"""Distance methods: they change the distance that attention sees, one file per method."""
