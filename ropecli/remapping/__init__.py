"""Methods that change the distance that attention sees, one file each, and the attention that computes with them."""
