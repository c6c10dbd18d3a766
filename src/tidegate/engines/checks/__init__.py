"""One file, one check: each gives `CHECK`, what it proves and how. The file's name is the check's name."""
