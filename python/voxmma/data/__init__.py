"""Generated scenes, and the scan that ships."""
