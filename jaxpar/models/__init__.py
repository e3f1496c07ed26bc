"""Models as pure functions over tables of parameters. They do not depend on a mesh or its axes."""
