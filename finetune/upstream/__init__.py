"""What of other packages we lean on that they do not promise to keep; a test holds every row against the installed
releases, and every such name in our code against the rows. Imports no package that it speaks of.

    override    a method of theirs that we replace, or a class attribute: `called_from` must go on calling it
    call, read, write    what it says, of a private name, or of one inside an engine
    patch       an object of theirs that we change
"""
