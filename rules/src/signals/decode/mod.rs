//! Decoders for content within content, bounded in depth, size and time.
