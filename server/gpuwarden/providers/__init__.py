"""The providers: each module rents and releases instances of one platform, and reports whether they are billed."""
