"""Reports: runs, sweeps and scaling studies as one self-contained page."""
