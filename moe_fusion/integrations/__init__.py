"""The pass inside other people's programs; imported by them, never by the package."""
