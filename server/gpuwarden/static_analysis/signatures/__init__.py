"""Look up the names and arguments in each release of the training libraries, in tables made from the released wheels.

- `releases.choose(requirements)`: the release of each package that a job will get
- `resolve.Installed(places)`: imports, definitions and signatures in those releases
- `history.history(package, name, parameter)`: the first and last release with a name, and its replacement
"""
