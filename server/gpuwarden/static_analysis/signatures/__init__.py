"""Which names and arguments each release of a training library has, from tables made of the released wheels.

- `releases.choose(requirements)`: the release of each package that a job will get
- `resolve.Installed(places)`: imports, definitions and signatures in those releases
- `history.history(package, name, parameter)`: since when, until when, and what replaced it
"""
