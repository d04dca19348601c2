"""`lmcache bench l2`: our native plugin beside LMCache's own file adapter and beside fio."""
