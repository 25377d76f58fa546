"""What a trainer reads of a session: records and samples."""
