"""Reports: self-contained HTML pages for offline reading, made from run folders only."""
