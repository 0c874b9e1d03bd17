"""Two small models whose flaws are typical, and the loops that train them under the advisor."""
