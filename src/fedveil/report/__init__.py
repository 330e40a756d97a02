"""Reports: pages made from run folders alone, each complete in one file, for reading offline."""
