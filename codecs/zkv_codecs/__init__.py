"""Gradient codecs: pure and composable, importable alone; they know no socket, loop or clock."""
