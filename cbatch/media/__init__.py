"""Pictures that come with rows: files, URLs and bytes, up to arrays of pixels."""
