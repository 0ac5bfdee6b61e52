"""What every tier shares: errors, records, settings, servers, channels. Knows no tier and no ML library."""
