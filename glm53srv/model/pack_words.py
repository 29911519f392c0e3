"""The words a random model speaks: training text for the small tokenizer of model/pack.py.

Plain English words put together for this package, by theme. Their order is their rank: earlier words are
repeated more often in the training text, so that they become whole tokens first.
"""

_TEXT = """
the and a of to in is you that it for was on are with as be at this have from or by not but what all can there
their which do how if will up about out many then them these so some would make like into time has look two
more we I my me your his her our its they he she who when where why because while until before after over
under between

hello thanks please sorry welcome yes no maybe sure okay fine great nice good better best bad worse right
wrong question answer reason idea thought opinion doubt guess hint clue story joke poem letter message note
list table

sun moon star sky cloud rain snow wind storm thunder fog frost ice heat cold warm cool dry wet mild weather
season spring summer autumn winter morning noon evening night midnight today tomorrow yesterday week month
year decade century moment minute hour second early late soon never always often rarely sometimes once twice
again river lake sea ocean wave tide beach shore island valley hill mountain cliff cave forest wood tree leaf
root branch bark seed flower grass moss fern meadow field garden path bridge road street corner square harbour
village town city country border north south east west stone rock sand clay mud dust earth water fire smoke
ash flame spark

house door window wall roof floor ceiling stair kitchen chair bench bed pillow blanket curtain carpet lamp
candle mirror clock shelf drawer key lock handle basket bottle glass cup plate bowl spoon fork knife kettle
oven bread butter cheese milk egg salt pepper sugar honey flour rice bean lentil onion garlic carrot potato
tomato apple pear plum cherry lemon orange grape melon berry nut almond walnut soup stew salad sauce cake
biscuit coffee tea juice wine vinegar oil breakfast lunch dinner supper snack recipe taste smell flavour sweet
sour bitter salty

cat dog horse cow sheep goat pig hen duck goose swan crow owl eagle robin sparrow fox wolf bear deer hare
mouse squirrel hedgehog otter seal whale dolphin shark salmon trout crab lobster snail worm spider beetle ant
bee wasp butterfly moth frog toad lizard snake turtle elephant lion tiger monkey camel giraffe zebra penguin
parrot

mother father sister brother daughter son child baby uncle aunt cousin friend neighbour guest stranger teacher
pupil student doctor nurse farmer baker tailor sailor soldier painter singer dancer writer reader printer
builder carpenter mason plumber driver pilot captain engineer chemist lawyer judge clerk merchant king queen
prince knight

head face eye ear nose mouth tooth tongue lip chin neck shoulder arm elbow hand finger thumb chest heart lung
back stomach leg knee foot toe skin bone blood muscle breath voice sleep dream hunger thirst pain fever cough
health

run walk jump climb swim fly crawl slide fall rise turn stop start wait stay leave arrive enter return follow
lead carry bring take give send receive keep lose find search hide show open close push pull lift drop throw
catch hold touch press cut break tear bend fold tie join split share gather spread fill empty pour mix stir
boil bake fry cook eat drink bite chew swallow wash clean sweep wipe paint draw write read spell count add
subtract multiply divide measure weigh compare choose decide plan prepare build repair change grow shrink
improve learn teach study practise remember forget understand explain describe repeat ask reply speak talk
whisper shout sing laugh smile cry listen hear see watch notice feel think believe know hope wish want need
prefer enjoy hate fear trust help thank forgive

big small large tiny huge long short tall wide narrow deep shallow thick thin heavy light strong weak hard
soft rough smooth sharp blunt round flat straight crooked full hollow clear dark bright dull dirty new old
young ancient modern fresh stale rich poor cheap costly free busy lazy quick slow loud quiet calm angry happy
sad proud shy brave afraid kind cruel gentle polite rude clever foolish wise honest funny serious strange
common rare simple complex easy difficult useful possible certain likely ready safe dangerous healthy sick
tired hungry lonely lucky

red blue green yellow brown purple pink grey black white silver golden pale vivid plain striped spotted one
three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred thousand million half
quarter third pair dozen first last next other another each every both neither few several enough much less
least

number word sentence page book chapter title language grammar meaning sound rhythm song music drum flute
violin piano guitar trumpet theatre film picture colour shape line circle triangle cube sphere edge surface
pattern map machine engine wheel gear lever screw nail hammer saw drill pump pipe wire cable switch battery
motor magnet computer keyboard screen network server program code function variable loop array string buffer
memory disk file folder token layer model weight matrix vector tensor kernel thread queue cache signal channel
packet protocol

ship boat sail anchor rope train rail station tunnel bus car truck bicycle plane airport ticket journey travel
compass suitcase passport hotel market shop price coin money bank office school college library museum
hospital church castle tower palace prison factory workshop mill mine farm barn stable fence gate well ditch
plough harvest

war peace law rule order freedom duty promise truth lie secret mystery danger luck chance choice mistake
problem solution result cause effect example proof theory science nature energy force speed distance pressure
history future past present culture custom belief value virtue courage patience wisdom justice beauty silence

above below inside outside beside behind beyond across along around against among through toward without
within however therefore although unless whether perhaps almost quite rather very really nearly exactly
suddenly slowly quickly quietly carefully finally together apart alone instead already still yet even only
just also too else something anything nothing everything someone anyone everyone nobody somewhere nowhere
everywhere myself yourself
"""
WORDS = tuple(_TEXT.split())
