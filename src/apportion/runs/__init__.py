"""What every training run is, whatever it trains: a folder, its files, its log and its progress."""
