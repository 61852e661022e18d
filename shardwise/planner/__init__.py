"""Know before you pay: time and memory of a layout on a cluster, the best layout, a dry run of any world."""
