"""Distance methods: they change the distance that attention sees, similar ones in one file."""
