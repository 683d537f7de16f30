"""The program that a comparison starts from: of another revision, or with other packages."""
