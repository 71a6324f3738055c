"""What people need who operate a federation: kits for sites, a certificate authority, checks, status, control, backups."""
