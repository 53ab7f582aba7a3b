"""Shows plans and timelines to people."""
