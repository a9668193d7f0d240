"""A checkpoint's folder or Hub id: opening, reading, planning and writing a patch, and the record of it."""
