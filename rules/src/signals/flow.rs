//! Text of memory banks, recognised when it leaves (P15).
