//! Keys: everything that signs or checks a signature. It decides nothing.
