"""Models as pure functions over tables of parameters. They know no mesh and no axis."""
